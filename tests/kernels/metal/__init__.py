"""Metal shaders, run on the CPU by tests/support/metal_shim: no Mac is needed; none was there."""
