# Causal attention of one head, and its gradients.
import torch

torch.set_default_dtype(torch.float64)
T, HS = 4, 2
q, k, v = (torch.tensor(values).view(T, HS).requires_grad_() for values in (
    [1.0, 0.5, -1.0, 2.0, 0.25, 1.5, 2.0, -0.5],
    [0.5, 1.0, 1.5, -1.0, -0.5, 0.75, 1.0, 2.0],
    [1.0, 2.0, -1.0, 0.5, 3.0, -2.0, 0.0, 1.0]))
dout = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.25, 1.0, 1.5, 0.0]).view(T, HS)

scores = q @ k.T / HS**0.5
scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
out = torch.softmax(scores, dim=-1) @ v
out.backward(dout)

lse = torch.logsumexp(scores, dim=-1)
results = {"out": out, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}
for name, values in results.items():
    print(name + ":", *(f"{value:.10f}" for value in values.flatten().tolist()))
