"""Which objects are public, and what their docstrings lack."""

import ast
import functools
import importlib
import inspect
import re
import sys
import textwrap

import pages

PACKAGES = ("collectives", "wagma")
SHOWN = r"^::: (\S+)\n((?:    .*\n)*)"
ARRAYS = re.compile(r"\b(Vector|Array|ArrayLike|NDArray|ndarray)\b")  # in an annotation
DTYPE = re.compile(r"\b(dtypes?|int\d*|float\d*)\b")
SHAPE = re.compile(r"\b(shape|1-D|one dimension|lengths)\b")
DURATION = re.compile(r"\b(how long|latency|seconds|stall|time|timeout|waiting)\b", re.IGNORECASE)
UNIT = re.compile(r"\b(seconds?|share)\b", re.IGNORECASE)
HEADING = re.compile(r"((?:Args|Attributes|Raises|Returns|Example)(?:, \w+)*):(.*)")
ITEM = re.compile(r"^    (\*{0,2}\w+(?:, \*{0,2}\w+)*):(.*(?:\n      .*|\n$)*)", re.MULTILINE)
REFERENCE = re.compile(r"(?:as for|those of|see)\s+`([\w.]+)`")
SOURCE = re.compile(r"^ *Source: \S", re.MULTILINE)


# --- Which objects are public


def public():
    """Return by name what the API's pages show: an object, and the class that it is shown in."""
    found = {}
    for page in sorted((pages.ROOT / "docs").glob("api-*.md")):
        for path, options in re.findall(SHOWN, page.read_text(), re.MULTILINE):
            found[path] = shown = resolved(path)
            if inspect.ismodule(shown) and "members: false" not in options:
                names = getattr(shown, "__all__", None) or defined_in(shown)
                found |= {f"{path}.{name}": getattr(shown, name) for name in names}
    members = {
        f"{path}.{name}": (member, kind)
        for path, kind in found.items()
        if inspect.isclass(kind)
        for name, member in members_of(kind)
    }
    documented = {
        path: each
        for path, each in found.items()
        if inspect.ismodule(each) or (callable(each) and is_from(each, *PACKAGES))
    }
    return {path: (each, None) for path, each in documented.items()} | members


def resolved(path):
    """Return what a dotted name stands for."""
    module, attributes = path, []
    while module:
        try:
            return functools.reduce(getattr, attributes, importlib.import_module(module))
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attributes.insert(0, last)
    raise AttributeError(path)


def defined_in(module):
    """Return the public names of what a module itself defines."""
    own = (name for name, each in vars(module).items() if is_from(each, module.__name__))
    return [name for name in own if not name.startswith("_")]


def is_from(each, *modules):
    """Return whether an object was defined in one of these modules or packages."""
    module = getattr(each, "__module__", None) or ""
    return any(f"{module}.".startswith(f"{name}.") for name in modules)


def members_of(kind):
    """Yield the public methods and properties of a class that are ours, inherited ones too."""
    data = fields(kind)
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        code = code_of(member)
        if name in data or (name.startswith("_") and name != "__call__"):
            continue
        if inspect.isfunction(code) and is_from(code, *PACKAGES) and code.__name__ != "<lambda>":
            yield name, member


def code_of(each):
    """Return the function of a method, a property, or a class: what its constructor runs."""
    if inspect.isclass(each):
        code = vars(each).get("__post_init__" if fields(each) else "__init__")
        return None if is_from(code, "typing") else code  # a protocol's
    return each.fget if isinstance(each, property) else inspect.unwrap(each)


def fields(each):
    """Return the annotations of a dataclass's or named tuple's fields by name."""
    names = getattr(each, "__dataclass_fields__", None) or getattr(each, "_fields", ())
    return {name: str(each.__annotations__[name]) for name in names}


def attributes(kind):
    """Return a class's own public attributes: their annotations, "" where they have none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    stored = [node for node in stored if isinstance(node.ctx, ast.Store)]
    of_self = [node.attr for node in stored if ast.unparse(node.value) == "self"]
    annotated = {name: str(each) for name, each in inspect.get_annotations(kind).items()}
    found = dict.fromkeys(of_self, "") | annotated
    return {name: each for name, each in found.items() if not name.startswith("_")}


# --- What docstrings say


@functools.cache
def sections(text):
    """Return the text under each heading of a docstring."""
    found, heading = {}, None
    for line in inspect.cleandoc(text or "").splitlines():
        if match := HEADING.fullmatch(line):
            heading = match[1]
            found[heading] = match[2]
        elif line and not line.startswith(" "):
            heading = None
        elif heading:
            found[heading] += "\n" + line
    return found


def items(text, heading):
    """Return what is said of each name under a heading; of "*", what is said of all."""
    found = {}
    for names, body in sections(text).items():
        if heading in names.split(", "):
            for match in ITEM.finditer(body):
                found |= dict.fromkeys(match[1].replace("*", "").split(", "), match[2])
            found["*"] = body.partition("\n")[0]
    return found


def text_of(each, owner=None):
    """Return an object's docstring, which a class may inherit from another."""
    name = getattr(code_of(each), "__name__", None) if owner else None
    return inspect.getdoc(getattr(owner, name) if owner else each) or ""


def texts(each, owner):
    """Return the docstrings that may say what an argument is, an object's own first."""
    found = [text_of(each, owner)]
    kind = owner or each
    if inspect.isclass(kind):
        for base in (base for base in kind.__mro__ if is_from(base, *PACKAGES)):
            called = [vars(base)[name] for name in ("__call__", "__init__") if name in vars(base)]
            found += [each.__doc__ or "" for each in (base, *called)]
    return [*found, sys.modules[kind.__module__].__doc__ or ""]


def said_of(name, each, owner=None):
    """Return what docstrings say of an argument or attribute, also those that it refers to."""
    for text in texts(each, owner):
        arguments = items(text, "Args")
        said = (arguments | items(text, "Attributes")).get(name) or arguments.get("*")
        if said:
            reference = REFERENCE.search(said)
            there = reference and named(reference[1], each)
            return said + ((said_of(name, there) or "") if callable(there) else "")
    own = text_of(each, owner)
    return own if re.search(rf"`{name}\b", own) else None


def named(name, each):
    """Return what an object's docstring calls by this name, None if there is no such thing."""
    around = f"{each.__module__}.{each.__qualname__}".rpartition(".")[0]
    modules = (around, each.__module__, *PACKAGES, "wagma.optim.averager", "wagma.simulation")
    for path in (*(f"{module}.{name}" for module in modules), name):
        try:
            return resolved(path)
        except AttributeError:
            pass
    return None


# --- What they lack


def problems(each, owner=None):
    """Yield what an object's docstring, and those that it relies on, do not say."""
    text = text_of(each, owner)
    if isinstance(each, property) and not text:
        text = said_of(each.fget.__name__, owner) or ""
    if not text.strip():
        yield "has no docstring"
    elif not inspect.ismodule(each):
        yield from problems_of_arguments(each, owner)
        yield from problems_of_errors(each, owner)
        if not inspect.isclass(each):
            yield from problems_of_result(each, text)


def problems_of_arguments(each, owner):
    values, code = attributes(each) if inspect.isclass(each) else {}, code_of(each)
    if code:
        parameters = inspect.signature(code).parameters.values()
        values |= {p.name: str(p.annotation) for p in parameters if p.name != "self"}
    for name, annotation in values.items():
        said = said_of(name, each, owner)
        if said is None:
            yield f"does not say what {name} is"
        else:
            summary = text_of(each, owner).partition("\n\n")[0]
            yield from problems_of_value(name, annotation, said, summary if fields(each) else "")


def problems_of_value(name, annotation, said, summary=""):
    if ARRAYS.search(annotation) and not (DTYPE.search(said) and SHAPE.search(said)):
        yield f"does not give the shape and dtype of {name}"
    is_time = "float" in annotation and DURATION.search(f"{name} {said}")
    if is_time and not UNIT.search(said + summary):
        yield f"does not give the unit of {name}"


def problems_of_result(each, text):
    annotation = str(inspect.signature(code_of(each)).return_annotation)
    yield from problems_of_value("what it returns", annotation, text)
    nothing = annotation in ("None", "Iterator[None]") or isinstance(each, property)
    if not nothing and not re.search(r"\b([Rr]eturns?|Whether|Say|Take)\b", text):
        yield "does not say what it returns"


def problems_of_errors(each, owner):
    code = code_of(each)
    said = "".join(texts(each, owner) if inspect.isclass(each) else [text_of(each, owner)])
    for name in sorted(raised_by(code, owner or each) if code else ()):
        if name not in said and not items(said, "Raises").get("*"):
            yield f"does not say when it raises {name}"


@functools.cache  # classes inherit methods
def raised_by(code, owner):
    """Return the names of the errors that a function, or a private one that it calls, makes."""
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(ast.unparse(node.exc.func).rpartition(".")[2])
        elif isinstance(node, ast.Call):
            place, _, name = ast.unparse(node.func).rpartition(".")
            where = {"": sys.modules[code.__module__], "self": owner}.get(place)
            called = inspect.getattr_static(where, name, None) if name.startswith("_") else None
            if inspect.isfunction(called) and called is not code:
                found |= raised_by(inspect.unwrap(called), owner)
    return found - {"NotImplementedError"}  # of what a subclass defines


def has_source(kind):
    """Return whether the docstring of a method's class names where the method comes from."""
    return bool(SOURCE.search(kind.__doc__ or ""))
