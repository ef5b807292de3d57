"""LayerNorm of two rows of four channels in PyTorch, and its gradients."""
import torch

torch.set_default_dtype(torch.float64)
layer = torch.nn.LayerNorm(4, eps=1e-5)
layer.weight.data = torch.tensor([1.0, 1.0, 2.0, -1.0])
layer.bias.data = torch.tensor([0.0, 0.0, 0.0, 1.0])
inp = torch.tensor([[1.0, 1.0, 5.0, 5.0], [1.0, 2.0, 3.0, 6.0]], requires_grad=True)
out = layer(inp)
out.backward(torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.5, 2.0]]))
for name, values in [
    ("out", out),
    ("dinp", inp.grad),
    ("dweight", layer.weight.grad),
    ("dbias", layer.bias.grad),
]:
    print(name, *(f"{value:.9f}" for value in values.flatten().tolist()))
