"""Where the configuration was before it was `kernel_dispatch.config`."""
