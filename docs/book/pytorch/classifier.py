# The cross-entropy loss of a row of logits, and its gradient.
import math
import torch

logits = torch.tensor([[0.0, math.log(2), math.log(5)]], dtype=torch.float64, requires_grad=True)
loss = torch.nn.functional.cross_entropy(logits, torch.tensor([2]))
loss.backward()

results = {"loss": loss, "dlogits": logits.grad}
for name, values in results.items():
    print(name + ":", *(f"{value:.10f}" for value in values.flatten().tolist()))
