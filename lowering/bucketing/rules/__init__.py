"""One rule for each operator that may run on padded tensors, by what it does with a dimension.

Each module fills the table when it is imported.
"""

from lowering.bucketing.rules import creation as creation
from lowering.bucketing.rules import indexing as indexing
from lowering.bucketing.rules import pointwise as pointwise
from lowering.bucketing.rules import positions as positions
from lowering.bucketing.rules import products as products
from lowering.bucketing.rules import reductions as reductions
from lowering.bucketing.rules import rows as rows
from lowering.bucketing.rules import views as views
from lowering.bucketing.rules.table import RULES as RULES
