"""``python -m experiments.bert``."""

from experiments.bert import Config, build
from jaxtrain.run.main import main

if __name__ == "__main__":
    main(Config, build)
