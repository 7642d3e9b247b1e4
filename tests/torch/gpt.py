#!/usr/bin/env python3
"""One rank of a training of a small GPT, split over two ranks by PyTorch's RPC over TensorPipe.

Rank 0 has the embeddings and the first half of the blocks, rank 1 the second half, the head and the
loss. Each step sends activations one way and gradients the other. Everything is seeded and runs in
one thread, so that the losses are the same bits whatever carries them. Rank 0 prints `loss STEP
VALUE` with all digits of the value.
"""

import argparse
import os

import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.distributed.optim import DistributedOptimizer

import torch
from torch import nn

VOCAB, CONTEXT, WIDTH, HEADS, BLOCKS, BATCH = 96, 64, 128, 4, 4, 16


class Block(nn.Module):
    """Attention that looks back only, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.register_buffer(
            "mask", torch.triu(torch.full((CONTEXT, CONTEXT), float("-inf")), diagonal=1)
        )

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=self.mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Front(nn.Module):
    """What rank 0 computes."""

    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS // 2)])

    def forward(self, tokens):
        return self.blocks(self.token(tokens) + self.place(torch.arange(CONTEXT)))


class Back(nn.Module):
    """What rank 1 computes: the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(*[Block() for _ in range(BLOCKS // 2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, x, targets):
        logits = self.head(self.norm(self.blocks(x)))
        return nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1))

    def parameter_refs(self):
        return [rpc.RRef(p) for p in self.parameters()]


def batch(step: int, text: torch.Tensor):
    """Windows of the text and the same one further on."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH,), generator=generator).tolist()
    return tuple(torch.stack([text[s + d : s + d + CONTEXT] for s in starts]) for d in (0, 1))


def train(steps: int):
    torch.manual_seed(1)
    # A text with something to learn: a walk whose next step depends on the last two.
    text = [1, 2]
    for i in range(4096):
        text.append((text[-1] * 3 + text[-2] + i % 5) % VOCAB)
    text = torch.tensor(text)
    front, back = Front(), rpc.remote("rank1", Back)
    parameters = [rpc.RRef(p) for p in front.parameters()] + back.rpc_sync().parameter_refs()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.3)
    for step in range(steps):
        with dist_autograd.context() as context:
            tokens, targets = batch(step, text)
            loss = back.rpc_sync().forward(front(tokens), targets)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        print(f"loss {step} {loss.item().hex()} {loss.item():.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True, choices=[0, 1])
    parser.add_argument(
        "--port", type=int, required=True, help="where the ranks meet (TCP, 127.0.0.1)"
    )
    parser.add_argument(
        "--transport", required=True, choices=["ibv", "uv"], help="TensorPipe's: verbs or TCP"
    )
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=2,
        rpc_timeout=60,
        init_method=f"tcp://127.0.0.1:{args.port}",
        _transports=[args.transport],
        _channels=["basic"],
    )
    rpc.init_rpc(f"rank{args.rank}", rank=args.rank, world_size=2, rpc_backend_options=options)
    if args.rank == 0:
        train(args.steps)
    rpc.shutdown()


if __name__ == "__main__":
    main()
