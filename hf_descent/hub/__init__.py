"""Model cards and what lies beside the weights on the Hub."""
