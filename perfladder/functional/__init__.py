"""Which named call, `torch.nn.functional` or other, of which module launches each kernel, and with which inputs."""
