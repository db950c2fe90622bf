"""One file for each family of kernels: kernels, launchers, meaning, registration."""
