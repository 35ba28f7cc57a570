"""Train a character-level GPT by WAGMA on the text of Python's own help topics.

    OMP_NUM_THREADS=1 mpiexec -n 4 python gpt.py

Every rank draws batches of its own. The model is evaluated on text that no rank trains on.
"""

import argparse
from pydoc_data.topics import topics

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional

from wagma.optim import WAGMA

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 64, 4, 2, 16


class Block(nn.Module):
    """Attention to what came before, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        heads = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Logits of each next character, shape (batch, length, characters)."""

    def __init__(self, characters):
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1])
        return self.head(self.norm(self.blocks(self.token(tokens) + self.position(places))))


def draw(tokens, batch, generator=None):
    """Return pieces of the text, and the same one character later."""
    starts = torch.randint(len(tokens) - CONTEXT, (batch, 1), generator=generator)
    pieces = tokens[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(model, batch):
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def write(model, length, start):
    """Return a text that the model continues."""
    tokens = start
    for _ in range(length):
        chances = model(tokens[None, -CONTEXT:])[0, -1].softmax(0)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1)])
    return tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500, help="of each rank (default: 500)")
    steps = parser.parse_args().steps
    comm = MPI.COMM_WORLD

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    tokens = torch.tensor([numbers[character] for character in text])
    train, test = tokens[: -len(tokens) // 10], tokens[-len(tokens) // 10 :]
    held_out = draw(test, 64, torch.Generator().manual_seed(0))

    torch.manual_seed(comm.rank)  # batches differ; models start from rank 0's all the same
    model = GPT(len(alphabet))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with WAGMA(model, adamw) as averager:
        with torch.no_grad():
            before = loss_of(model, held_out).item()
        for step in range(steps):
            adamw.zero_grad()
            loss = loss_of(model, draw(train, BATCH))
            loss.backward()
            adamw.step()
            if comm.rank == 0 and step % 50 == 0:
                print(f"step {step}: rank 0's loss {loss.item():.2f}", flush=True)
        with averager.averaged(), torch.no_grad():  # the average of all ranks' models
            after = loss_of(model, held_out).item()
            written = write(model, 200, held_out[0][0])[CONTEXT:]
    if comm.rank == 0:
        print("the model writes:", repr("".join(alphabet[token] for token in written)))
        print(f"held-out loss: {before:.2f} before, {after:.2f} after {steps} steps")
        print("expected on 4 ranks with default arguments: about 1.8")


if __name__ == "__main__":
    main()
