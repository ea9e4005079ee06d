"""Train a small GPT on lines of text, to guess each next letter. Plain PyTorch.

python gpt.py --steps 200
python gpt.py --text my_lines.txt --steps 2000
"""

import math
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LENGTH = 64  # letters of a line that count
NO_LETTER = -100  # after a line's end: cross_entropy ignores it


def read_lines(file: Path | None) -> Tensor:  # YOUR DATA
    """Encode the lines of a file, or made ones, as [lines, LENGTH + 1] bytes, then 0."""
    words = ["zero", "one", "two", "three", "four", "five", "six"]
    words += ["seven", "eight", "nine", "ten", "eleven", "twelve"]
    draw = torch.Generator().manual_seed(0)
    pairs = torch.randint(0, 7, (2000, 2), generator=draw).tolist()
    lines = [f"{words[a]} plus {words[b]} is {words[a + b]}." for a, b in pairs]
    lines += [f"{words[a + b]} minus {words[b]} is {words[a]}." for a, b in pairs]
    if file:
        lines = file.read_text(errors="replace").splitlines()
    text = torch.zeros(len(lines), LENGTH + 1, dtype=torch.int64)
    for row, line in zip(text, lines, strict=True):
        letters = [min(letter, 127) for letter in f" {line}".encode()[:LENGTH]]
        row[: len(letters)] = torch.tensor(letters)
    return text[torch.randperm(len(text), generator=draw)]


class Block(nn.Module):
    """Attention to the letters before, then two linear layers: [n, length, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head = width // heads  # size of a head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Add what a letter takes from those before it, and the linear layers' output."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=2)
        q, k, v = (part.unflatten(2, (-1, self.head)).transpose(1, 2) for part in parts)
        taken = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(taken.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):  # YOUR NETWORK
    """Lines [n, length] to scores of the next letters [n, length, 128]."""

    def __init__(self, width: int = 96, depth: int = 3, dropout: float = 0.1) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(depth))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Score the next letter at each position."""
        x = self.letter(text) + self.position.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x))


def targets_of(lines: Tensor) -> Tensor:
    """The next letter at each position [n, LENGTH]; the last of a line is its end, 0."""
    following, inside = lines[:, 1:], lines[:, :-1] > 0
    return following.where(inside, NO_LETTER)


def loss_sum(model: nn.Module, lines: Tensor, device: torch.device) -> Tensor:
    """Add up the losses of all letters of a batch of lines: a sum, not a mean."""
    scores = model(lines[:, :-1].to(device))
    targets = targets_of(lines).to(device)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")


def validate(model: nn.Module, lines: Tensor, device: torch.device) -> float:
    """Return the mean loss of a letter, over all letters of all lines."""
    model.eval()
    sums = torch.zeros(2, device=device)
    with torch.no_grad():
        for part in lines.split(100):
            sums[0] += loss_sum(model, part, device)
            sums[1] += (targets_of(part) != NO_LETTER).sum()
    model.train()
    return (sums[0] / sums[1]).item()


def main() -> None:
    """Train for --steps steps; keep the best weights, and a checkpoint to resume from."""
    parser = ArgumentParser()
    add = parser.add_argument
    add("--text", type=Path, help="a file of lines; else sums in words")
    add("--steps", type=int, default=200)
    add("--micro-batches", type=int, default=4, help="in a step")
    add("--batch-size", type=int, default=16, help="lines in a micro-batch")
    add("--lr", type=float, default=0.003)
    add("--dropout", type=float, default=0.1)
    add("--bf16", action="store_true", help="compute in bfloat16")
    add("--float64", action="store_true", help="compute in float64, for a proof")
    add("--validate-every", type=int, default=50, help="steps")
    add("--out", type=Path, default=Path("runs/gpt"))
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.float64:
        torch.set_default_dtype(torch.float64)
    lines = read_lines(args.text)
    train_lines, test_lines = lines[: -len(lines) // 10], lines[-len(lines) // 10 :]
    torch.manual_seed(1)
    model = GPT(dropout=args.dropout).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps)
    draws = torch.Generator().manual_seed(1)
    step, best = 0, math.inf
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "last.pt").exists():
        saved = torch.load(args.out / "last.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        draws.set_state(saved["draws"])
        step, best = saved["step"], saved["best"]
    while step < args.steps:
        shape = args.micro_batches, args.batch_size
        places = torch.randint(len(train_lines), shape, generator=draws)
        letters = (targets_of(train_lines[places.flatten()]) != NO_LETTER).sum()
        for micro_batch in train_lines[places]:
            with torch.autocast(device.type, torch.bfloat16, enabled=args.bf16):
                loss = loss_sum(model, micro_batch, device) / letters.item()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        step += 1
        if step % args.validate_every == 0 or step == args.steps:
            value = validate(model, test_lines, device)
            print(f"step {step}: a letter's loss {value:.4f}", flush=True)
            if value < best:
                best = value
                torch.save(model.state_dict(), args.out / "best.pt")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"schedule": schedule.state_dict(), "draws": draws.get_state()}
            torch.save(state | {"step": step, "best": best}, args.out / "last.pt")


if __name__ == "__main__":
    main()
