"""The networks of tests/data in torch."""

import torch

HEADS = 4


class Product(torch.nn.Module):
    """A module, so that the hook sees what is multiplied."""

    def forward(self, a, b):
        return a @ b


class Attention(torch.nn.Module):

    def __init__(self, width, time):
        super().__init__()
        for name in "qkvo":
            setattr(self, name + "_proj",
                    torch.nn.Linear(width, width, bias=False))
        self.scores = Product()
        self.mix = Product()
        mask = torch.full((time, time), -1e9).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (proj(x).view(batch, time, HEADS, -1).transpose(1, 2)
                   for proj in (self.q_proj, self.k_proj, self.v_proj))
        scores = self.scores(q, k.transpose(-2, -1))
        scores = scores / (width // HEADS)**.5 + self.mask
        mixed = self.mix(torch.softmax(scores, -1), v)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))


class Mlp(torch.nn.Module):

    def __init__(self, width, inner):
        super().__init__()
        self.up_proj = torch.nn.Linear(width, inner, bias=False)
        self.down_proj = torch.nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.gelu(self.up_proj(x)))


class Layer(torch.nn.Module):

    def __init__(self, width, inner, time):
        super().__init__()
        self.attention_norm = torch.nn.LayerNorm(width)
        self.attention = Attention(width, time)
        self.mlp_norm = torch.nn.LayerNorm(width)
        self.mlp = Mlp(width, inner)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(torch.nn.Module):
    """The network of tests/data/char-lm."""

    def __init__(self, weights):
        super().__init__()
        count, width = weights["embed.weight"].shape
        time = len(weights["positions.weight"])
        inner = len(weights["layers.0.mlp.up_proj.weight"])
        self.embed = torch.nn.Embedding(count, width)
        self.positions = torch.nn.Embedding(time, width)
        self.layers = torch.nn.ModuleList(
            Layer(width, inner, time) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, count, bias=False)
        self.load_state_dict({name: torch.from_numpy(weight.copy())
                              for name, weight in weights.items()})

    def forward(self, ids):
        x = self.embed(ids) + self.positions.weight[:ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Digits(torch.nn.Module):
    """The classifier of tests/data/digits-cnn."""

    def __init__(self, weights):
        super().__init__()
        for name in ("conv1", "conv2"):
            out, channels = weights[name + ".weight"].shape[:2]
            setattr(self, name, torch.nn.Conv2d(channels, out, 3, padding=1))
        for name in ("fc1", "fc2"):
            setattr(self, name, torch.nn.Linear(
                *weights[name + ".weight"].shape[::-1]))
        self.load_state_dict({name: torch.from_numpy(weight.copy())
                              for name, weight in weights.items()})

    def forward(self, images):
        x = torch.relu(self.conv1(images))
        x = torch.nn.functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))
