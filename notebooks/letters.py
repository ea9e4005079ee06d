"""Guess the next letter with a small transformer; plain PyTorch on one device.

python letters.py --epochs 2

On many devices, with all that a cluster needs:
ddp-course script mnist_ddp letters_ddp.py --parts letters.py
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def sentences(count: int, seed: int, length: int = 64) -> TensorDataset:
    """Make sums in words, and cut them into texts [count, length].

    The targets are each text's next letters [count, length]. A letter's number is its
    ASCII code. A text starts anywhere in a sentence:
    "ee plus four is seven. nine minus two is seven. six plus".
    """
    words = ["zero", "one", "two", "three", "four", "five", "six"]
    words += ["seven", "eight", "nine", "ten", "eleven", "twelve"]
    random = torch.Generator().manual_seed(seed)
    text = ""
    while len(text) <= count * length:
        a, b = sorted(torch.randint(0, 7, (2,), generator=random).tolist())
        text += f"{words[a]} plus {words[b]} is {words[a + b]}. "
        text += f"{words[b]} minus {words[a]} is {words[b - a]}. "
    letters = torch.tensor(list(text[: count * length + 1].encode()))
    texts, following = letters[:-1], letters[1:]
    return TensorDataset(texts.view(count, length), following.view(count, length))


def datasets(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """Make texts for training, and different ones for testing; the folder is not read."""
    train_set, test_set = sentences(2048, seed=1), sentences(256, seed=2)
    train_set.name = "letters"
    return train_set, test_set


class Block(nn.Module):
    """One layer of a transformer: attention to the letters before, two linear layers.

    It takes and returns [n, length, width].
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads  # size of a head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what a letter takes from those before it, and the linear layers' output."""
        y = self.norm1(x)
        projected = (layer(y) for layer in (self.query, self.key, self.value))
        # [n, heads, length, head] each
        q, k, v = (z.unflatten(2, (-1, self.head)).transpose(1, 2) for z in projected)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Net(nn.Module):
    """A transformer: texts [n, length] to scores of the next letters [n, length, 128]."""

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, length: int = 64
    ) -> None:
        super().__init__()
        self.letter = nn.Embedding(128, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.score = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, text: Tensor) -> Tensor:
        """Score the next letter at each position of each text."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.letter(text) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x))


def loss_and_metrics(model: nn.Module, batch: list, device: torch.device) -> tuple:
    """Compute the cross entropy of the scores, and the accuracy, summed over texts.

    The accuracy of a text is its fraction of correct letters.
    """
    text, following = (part.to(device) for part in batch)
    scores = model(text)
    right = (scores.argmax(dim=2) == following).double().mean(dim=1).sum()
    loss = F.cross_entropy(scores.flatten(0, 1), following.flatten())
    return loss, {"accuracy": right, "samples": len(text)}


def main() -> None:
    """Train, test after each epoch, and save the weights to letters.pt."""
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32, help="texts in a step")
    parser.add_argument("--lr", type=float, default=0.001)
    args = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_set, test_set = datasets(Path())
    train_batches = DataLoader(train_set, args.batch_size, shuffle=True)
    test_batches = DataLoader(test_set, args.batch_size)

    torch.manual_seed(1)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for batch in train_batches:
            loss, _ = loss_and_metrics(model, batch, device)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = 0.0
        with torch.no_grad():
            for batch in test_batches:
                _, metrics = loss_and_metrics(model, batch, device)
                right += metrics["accuracy"].item()
        share = right / len(test_set)
        print(f"epoch {epoch}: {share:.1%} of the letters right", flush=True)
    torch.save(model.state_dict(), "letters.pt")


if __name__ == "__main__":
    main()
