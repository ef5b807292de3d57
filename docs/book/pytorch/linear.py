# A linear layer and its gradients.
import torch

torch.set_default_dtype(torch.float64)
layer = torch.nn.Linear(2, 3)
layer.weight.data = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, -1.0]])
layer.bias.data = torch.tensor([0.0, 1.0, 0.0])
inp = torch.tensor([[1.0, 2.0], [3.0, -1.0]], requires_grad=True)

out = layer(inp)
out.backward(torch.tensor([[1.0, 0.0, 2.0], [0.0, 1.0, -1.0]]))

results = {"out": out, "dinp": inp.grad, "dweight": layer.weight.grad, "dbias": layer.bias.grad}
for name, values in results.items():
    print(name + ":", *(f"{value:.10f}" for value in values.flatten().tolist()))
