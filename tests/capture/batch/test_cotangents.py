"""Back-propagation that is not linear in what it passes back: equal to one device's, or refused by name."""

import re
from collections.abc import Callable

import keras
import pytest
import tensorflow as tf

from autodist_py.capture.inexact import inexact
