VERSION: str
TORCH: str
PYTHON: str
