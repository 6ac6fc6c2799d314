"""What each kind of file says: text as people see it, and what of it could not be put into words.

HTML is parsed by JustHTML, as browsers do; Word becomes HTML by mammoth first; PDF is read by
pypdf, front matter by PyYAML.  The libraries, but for the last, are those of the extra `documents`,
imported when a file needs them.
"""
