"""The audit: run an unchanged DDP script on instrumented CPU ranks and check what they did."""
