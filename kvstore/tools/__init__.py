"""What people and their programs use: the command, the doctor, pages and metrics, replays, benches."""
