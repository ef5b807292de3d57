"""Rounding to bf16 in PyTorch: the bits of f32 numbers before and after."""
import struct
import torch

values = [1.0, 1.00390625, 1.01171875, 1.0001, -1.0001, 3.14159265, 1e-3, 65504.0, 3.4e38, 1e-40]
for value in torch.tensor(values):
    bits = struct.unpack("I", struct.pack("f", value.item()))[0]
    rounded = struct.unpack("I", struct.pack("f", value.bfloat16().item()))[0]
    print(f"{bits:08x} {rounded >> 16:04x}")
param = torch.tensor(1.0, dtype=torch.bfloat16)
for _ in range(1000):
    param += 1e-3
print("1 + 1000 * 0.001 =", param.item())
