"""One batch can be learned by heart: model, loss, gradients, clipping and optimizer work together."""

import torch

from clearhead import AdamW, ModelConfig, Transformer, clip_gradients, cross_entropy


def test_one_batch_overfits() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 50, (4, 17), generator=generator)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    model = Transformer(ModelConfig(vocab_size=50, d_model=64, n_layers=2, n_heads=4, max_len=16), seed=0)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(150):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert cross_entropy(model(inputs), targets).item() < 0.01
