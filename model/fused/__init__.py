"""The network on a GPU: the same layers as `model.network`, as sequences of Triton kernels over stored formats, and as captured graphs."""
