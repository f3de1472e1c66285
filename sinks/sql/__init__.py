"""Tables as sinks, as far as SQL databases share them: the fields of a record's type, and the columns of a table.

Pure: it opens nothing, and knows no database. May import `pipeline`.
"""
