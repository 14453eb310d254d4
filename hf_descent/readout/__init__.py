"""What every layer would predict: the layer stack, the replay of a model's tail, large heads in tiles."""
