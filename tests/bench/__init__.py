"""The benchmark harness, its workloads and its peers."""
