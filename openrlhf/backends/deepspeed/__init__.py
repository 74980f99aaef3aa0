"""DeepSpeed behind `TrainEngine`. Nothing else imports it."""
