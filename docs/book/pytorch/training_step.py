"""Three optimizer steps of a linear model, each over two micro-batches. Prints loss, norm and parameters."""
import torch

model = torch.nn.Linear(2, 1, dtype=torch.float64)
with torch.no_grad():
    model.weight.copy_(torch.tensor([[0.5, -0.25]]))
    model.bias.fill_(0.1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
x = torch.tensor([[[1.0, 2.0], [-1.0, 0.5]], [[0.0, 1.0], [2.0, -2.0]]], dtype=torch.float64)
y = torch.tensor([[[1.0], [0.0]], [[-1.0], [2.0]]], dtype=torch.float64)
for step in range(3):
    total = 0.0
    optimizer.zero_grad()
    for inputs, targets in zip(x, y):
        # The mean over the step, not over the micro-batch: hence the division by the number of micro-batches.
        loss = torch.nn.functional.mse_loss(model(inputs), targets) / len(x)
        loss.backward()
        total += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    print(f"{total:.9f} {norm:.9f}", *[f"{p:.9f}" for p in model.weight.flatten().tolist() + model.bias.tolist()])
