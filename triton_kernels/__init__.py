"""The Triton tier of KDA. Empty so far: the kernels arrive with their own tests."""
