"""What an NVTX tool receives: a small one, built here, that prints it. And without `nvtx`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from stepgraph.profiling.ranges import PLAIN_RANGES, STEP_RANGES, StepNumbers

# The smallest tool that NVTX accepts: it is asked to put its functions into the tables of the
# process and prints what arrives. Payloads are an extension, which asks on its own.
# Layouts as in the headers of NVTX 3.
TOOL = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef void (*fn)(void);
typedef struct { size_t size; int (*table)(int, fn ***, unsigned *); } callbacks;
typedef struct {
  uint16_t version, size; uint32_t category; int32_t color_type; uint32_t color;
  int32_t payload_type, reserved; union { int64_t integer; const void *extended; } payload;
  int32_t message_type; const char *message;
} event;
typedef struct { uint64_t schema; size_t size; const int64_t *bytes; } extended;
typedef struct {
  uint64_t flags, type; const char *name, *description; uint64_t detail, offset;
  const void *semantics, *reserved;
} entry;
typedef struct {
  uint64_t mask; const char *name; uint64_t type, flags; const entry *entries; size_t count, size;
} schema;
typedef struct { size_t id, count; intptr_t *slots; } segment;
typedef struct {
  uint16_t version, size, module, compatibility; size_t count; segment *segments;
} extension;

static void numbers(const int64_t *values, size_t bytes) {
  for (size_t i = 0; i < bytes / 8; i++) printf(" %lld", (long long)values[i]);
  printf("\n"); fflush(stdout);
}
static void payload(const event *e) {
  if (e->payload_type == (int32_t)0xDFBD0009) {
    const extended *x = e->payload.extended;
    printf(" schema %llu of %d", (unsigned long long)x->schema, e->reserved);
    numbers(x->bytes, x->size);
  } else numbers(&e->payload.integer, 8);
}
static void *create(const char *name) { printf("domain %s\n", name); return strdup(name); }
static void whose(const char *domain) {
  if (domain && strcmp(domain, "stepgraph")) printf("[%s] ", domain);
}
static const char *reg(void *d, const char *s) { printf("register %s\n", s); return s; }
static void category(void *d, uint32_t id, const char *s) { printf("category %s\n", s); }
static int push(void *d, const event *e) {
  whose(d); printf("push %s", e->message); payload(e); return 0;
}
static int pop(void *d) { whose(d); printf("pop\n"); fflush(stdout); return 0; }
int InitializeInjectionNvtx2(const void *(*export)(uint32_t)) {
  const callbacks *c = export(1); fn **t; unsigned n;
  if (!c->table(5, &t, &n)) return 0;
  *t[4] = (fn)push; *t[5] = (fn)pop; *t[8] = (fn)category; *t[10] = (fn)reg;
  *t[12] = (fn)create;
  return 1;
}

static uint64_t schemas = 1000;
static uint64_t new_schema(void *d, const schema *s) {
  printf("schema %llu:", (unsigned long long)++schemas);
  for (size_t i = 0; i < s->count; i++)
    printf(" %s@%llu", s->entries[i].name ? s->entries[i].name : "-",
           (unsigned long long)s->entries[i].offset);
  printf(" (%zu bytes)\n", s->size);
  return schemas;
}
int InitializeInjectionNvtxExtension(extension *e) {
  intptr_t *slots = e->segments[0].slots;
  if (e->module == 2) slots[0] = (intptr_t)new_schema;
  return 1;
}
"""

PROGRAM = """
from stepgraph.profiling import ranges
print("attached", ranges.attached, flush=True)
with ranges.span(ranges.STEP, 41):
    with ranges.step_span(ranges.REPLAY, 41, 3, 4, 3, 17, 1):
        pass
    with ranges.step_span(ranges.REPLAY, 42, 4, 4, 4, 2**62, 0):
        pass
    with ranges.span(ranges.COPY, 9):
        pass
"""


def run(program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NVTX_", "NSYS_"))}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux" or sys.maxsize < 2**32:
        pytest.skip("building an NVTX tool needs a C compiler on 64-bit Linux")
    source = tmp_path_factory.mktemp("nvtx_tool") / "tool.c"
    source.write_text(TOOL)
    library = str(source.with_suffix(".so"))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(source)], check=True)
    return library


def laid_out(names: Sequence[str]) -> str:
    fields = " ".join(f"{name}@{8 * index}" for index, name in enumerate(names))
    return f"{fields} ({8 * len(names)} bytes)"


def test_a_tool_receives_ranges_and_payloads(tool: str) -> None:
    lines = run(NVTX_INJECTION64_PATH=tool).stdout.splitlines()
    assert "domain stepgraph" in lines
    assert "attached True" in lines
    registered = {line.removeprefix("register ") for line in lines if line.startswith("register ")}
    assert registered == PLAIN_RANGES | STEP_RANGES
    categories = {line for line in lines if line.startswith("category ")}
    assert categories == {
        f"category {name}" for name in ("step", "host", "device", "start", "profile")
    }

    schemas = {
        fields: schema
        for schema, fields in (line.split(": ") for line in lines if line.startswith("schema "))
    }
    of_ranges = schemas[laid_out(StepNumbers._fields)]
    shown = ("push", "pop")
    assert [line for line in lines if line.startswith(shown)] == [
        "push step 41",
        f"push replay {of_ranges} of 1 41 3 4 3 17 1",
        "pop",
        f"push replay {of_ranges} of 1 42 4 4 4 {2**62} 0",
        "pop",
        "push copy 9",
        "pop",
        "pop",
    ]


@pytest.mark.parametrize(
    ("environment", "warned"),
    [
        ({"NSYS_PROFILING_SESSION_ID": "7"}, True),
        ({"NVTX_INJECTION64_PATH": "/opt/tool.so", "NVTX_DISABLE": "1"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_without_the_package_a_profiled_process_warns_once(
    tmp_path: Path, environment: dict[str, str], warned: bool
) -> None:
    (tmp_path / "nvtx.py").write_text("raise ImportError('no nvtx here')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = run(PYTHONPATH=path, **environment)
    assert done.stdout == "attached False\n"
    assert done.stderr.count("RuntimeWarning") == done.stderr.count("pip install 'nvtx>=") == warned
