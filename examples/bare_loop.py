"""The smallest training loop with torchLoom. Runs with or without `loom up`."""

import torch

import torchloom

loom = torchloom.attach()  # finds the control plane; without one, training continues

model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    x = torch.randn(32, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    loom.step(loss=loss, samples=len(x))  # writes to memory; the tensor is read later, on another thread
    if loom.stopping:  # an operator asked the job to end
        break

print(f"loss {loss.item():.6f}")
