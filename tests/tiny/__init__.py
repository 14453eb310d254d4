"""What the tests share: tiny models, rows that they learn, short trainings, and truths to compare with."""
