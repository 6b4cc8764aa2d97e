"""Train an image classifier with torchLoom.

    python examples/train_integrated.py --replica-id hi
    python examples/train_integrated.py --replica-id there --epochs 5 --loaders 2 --checkpoints runs/there

The images are generated digits of a seven-segment display, shifted and with noise; nothing is downloaded. Two
processes with different replica ids are two replicas of one job. The script also runs without a control plane. If it is
killed and started again with the same --checkpoints, the result is bit-identical to that of an undisturbed run.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset

import torchloom
from torchloom.data import ElasticLoader

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--job", default=None, help="name of the job (default: TORCHLOOM_JOB, else this file's name)")
parser.add_argument("--replica-id", default=None, help="name of this replica, for example hi (default: generated)")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--samples", type=int, default=6400, help="training images per epoch")
parser.add_argument("--loaders", type=int, default=0, help="processes that load data (0: load in the training process)")
parser.add_argument("--log-interval", type=int, default=20, help="steps between two printed lines")
parser.add_argument("--dry-run", action="store_true", help="run one batch only, as a test")
parser.add_argument("--checkpoints", default=None, metavar="FOLDER", help="folder to save to and resume from")
parser.add_argument("--every", type=int, default=100, help="steps between two checkpoints")
parser.add_argument("--save", default=None, metavar="PATH", help="file for the final parameters")
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.backends.cudnn.deterministic = True  # the same seed gives the same bits

# Which of the segments  top, upper left, upper right, middle, lower left, lower right, bottom  are lit in 0 to 9.
LIT = ["1110111", "0010010", "1011101", "1011011", "0111010", "1101011", "1101111", "1010010", "1111111", "1111011"]
SEGMENTS = [  # rows and columns of each in a 16 × 10 drawing
    (slice(0, 2), slice(1, 9)), (slice(1, 8), slice(0, 2)), (slice(1, 8), slice(8, 10)), (slice(7, 9), slice(1, 9)),
    (slice(8, 15), slice(0, 2)), (slice(8, 15), slice(8, 10)), (slice(14, 16), slice(1, 9)),
]  # fmt: skip


class Digits(Dataset):
    """Generated images. The seed of image i is i, so it does not depend on the order or the process that draws it."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first
        self.clean = torch.zeros(10, 16, 10)
        for digit, lit in enumerate(LIT):
            for (rows, columns), on in zip(SEGMENTS, lit, strict=True):
                self.clean[digit, rows, columns] = max(float(on), float(self.clean[digit, rows, columns].min()))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        chance = torch.Generator().manual_seed(self.first + i)
        digit = int(torch.randint(10, (), generator=chance))
        top, left = (int(n) for n in torch.randint(5, (2,), generator=chance))
        image = 0.6 * torch.randn(1, 20, 16, generator=chance)
        image[0, top : top + 16, left : left + 10] += self.clean[digit]
        return image, digit


order = torch.Generator().manual_seed(args.seed)  # separate: shuffling does not depend on other random numbers
train_images, test_images = Digits(args.samples, first=0), Digits(1000, first=10**9)
train_data = ElasticLoader(train_images, args.batch_size, shuffle=True, num_workers=args.loaders, generator=order)
test_data = ElasticLoader(test_images, args.batch_size, num_workers=args.loaders)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(32 * 5 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
).to(device)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

# From here on torchLoom sees this process. An exception that leaves this block is reported as the reason of its exit.
with torchloom.attach(args.job, args.replica_id) as loom:
    loom.watch(optimizer)  # lr, betas and weight decay can now be changed while it trains: `loom set JOB lr=5e-4`
    loom.watch(train_data)  # and these: `loom set JOB batch_size=128 --lr-rule linear`, `loom set JOB loaders=4`
    log_interval = loom.log_interval(args.log_interval)
    checkpoints = torchloom.Checkpoints(args.checkpoints, every=args.every, keep=3) if args.checkpoints else None
    state = {"model": model, "optimizer": optimizer, "data": train_data, "epoch": 1}
    step = checkpoints.resume(state) if checkpoints else 0  # the newest valid checkpoint; 0 if there is none
    accuracy = 0.0
    for epoch in range(state["epoch"], args.epochs + 1):
        state["epoch"] = epoch
        model.train()
        for images, digits in train_data:  # after a resume, the rest of the epoch
            loss = nn.functional.cross_entropy(model(images.to(device)), digits.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # The loss stays a tensor: .item() here would make this loop wait for the GPU at every step.
            loom.step(loss=loss, samples=len(images), epoch=epoch, accuracy=accuracy)
            step += 1
            if checkpoints:
                checkpoints.save(step, state)  # copies and returns; the file is written in the background
            if step % log_interval.value == 0:
                print(f"epoch {epoch}  step {step:5d}  loss {loss.item():.4f}", flush=True)
            if args.dry_run or loom.stopping:
                break

        model.eval()
        right = seen = 0
        with torch.no_grad():
            for images, digits in test_data:
                right += int((model(images.to(device)).argmax(1) == digits.to(device)).sum())
                seen += len(digits)
                if args.dry_run:
                    break
        accuracy = right / seen
        print(f"epoch {epoch}  accuracy {accuracy:.1%}", flush=True)
        if args.dry_run or loom.stopping:
            break

if args.save:
    torch.save(model.state_dict(), args.save)
