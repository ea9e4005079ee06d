"""The audit: run an unchanged DDP script on CPU ranks under witnesses, and judge what they did."""
