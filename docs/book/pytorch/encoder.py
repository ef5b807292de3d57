"""Token and position embedding in PyTorch: B = 2, T = 3, V = 4, C = 2."""
import torch

torch.set_default_dtype(torch.float64)
wte, wpe = torch.nn.Embedding(4, 2), torch.nn.Embedding(3, 2)
wte.weight.data = torch.arange(8.0).reshape(4, 2)
wpe.weight.data = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
tokens = torch.tensor([[2, 0, 2], [1, 2, 0]])
out = wte(tokens) + wpe(torch.arange(3))
out.backward(torch.arange(1.0, 13.0).reshape(2, 3, 2))
for name, values in [("out", out), ("dwte", wte.weight.grad), ("dwpe", wpe.weight.grad)]:
    print(name, *(f"{value:.6f}" for value in values.flatten().tolist()))
