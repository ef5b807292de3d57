"""Three steps of AdamW in PyTorch, with gradient clipping."""
import torch

torch.set_default_dtype(torch.float64)
params = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
optimizer = torch.optim.AdamW([params], lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
for grads in [[3.0, 0.0, 4.0], [0.1, 0.2, -0.2], [-0.3, 0.0, 1e-9]]:
    params.grad = torch.tensor(grads)
    norm = torch.nn.utils.clip_grad_norm_([params], 1.0)
    optimizer.step()
    print("norm", f"{norm.item():.9f}")
    print("params", *(f"{value:.9f}" for value in params.tolist()))
