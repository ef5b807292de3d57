"""GELU in PyTorch: values, derivatives, and the error of the tanh approximation."""
import torch
from torch.nn.functional import gelu

torch.set_default_dtype(torch.float64)
x = torch.tensor([-10.0, -5.0, -2.0, -1.0, -0.1, 0.0, 0.1, 1.0, 2.0, 5.0], requires_grad=True)
out = gelu(x, approximate="tanh")
out.sum().backward()
print("x", *(f"{value:g}" for value in x.tolist()))
print("gelu", *(f"{value:.9e}" for value in out.tolist()))
print("slope", *(f"{value:.9e}" for value in x.grad.tolist()))
grid = torch.linspace(-10, 10, 200_001)
print("difference", f"{(gelu(grid) - gelu(grid, approximate='tanh')).abs().max().item():.6f}")
