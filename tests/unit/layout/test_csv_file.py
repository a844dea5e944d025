"""MiniMalloc's files: read in all their forms, written with offsets, refused with the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from remat.errors import FileFormatError, InfeasibleLayout, RematError
from remat.layout import Buffer, LayoutProblem, LayoutStatus, Placement
from remat.layout.csv_file import load_csv, save_csv


def written(folder: Path, text: str) -> Path:
    path = folder / "file.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "id,lower,upper,size\na,0,3,4\nb,3,9,5\n",
        "size,id,upper,lower\n4,a,3,0\n5,b,9,3\n",
        "buffer,start,end,size\na,0,2,4\nb,3,8,5\n",
        "buffer_id,begin,upper,size\r\na, 0, 3, 4\r\n\r\nb, 3, 9, 5\r\n",
        "\ufeffid,lower,upper,size,offset,gaps,hint\na,0,3,4,7,,\nb,3,9,5,1,,2\n",
    ],
)
def test_every_form_of_the_header_gives_the_same_problem(tmp_path: Path, text: str) -> None:
    assert load_csv(written(tmp_path, text), 9) == LayoutProblem((Buffer("a", 0, 3, 4), Buffer("b", 3, 9, 5)), 9)


def test_alignment_is_read_and_may_be_empty(tmp_path: Path) -> None:
    problem = load_csv(written(tmp_path, "id,lower,upper,size,alignment\na,0,3,4,8\nb,3,9,5,\n"))
    assert [buffer.alignment for buffer in problem.buffers] == [8, 1]


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    problem = LayoutProblem((Buffer("a", 0, 3, 4), Buffer("b,c", 1, 9, 5)))
    path = tmp_path / "out.csv"
    save_csv(problem, Placement((5, 0), 9, 9, LayoutStatus.OPTIMAL, "test"), path)
    assert path.read_text() == 'id,lower,upper,size,offset\na,0,3,4,5\n"b,c",1,9,5,0\n'
    assert load_csv(path) == problem


HEADER = "id,lower,upper,size\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("id,lower,upper\na,0,1\n", "line 1: the column size is missing"),
        ("id,lower,upper,size,colour\n", "line 1: no column is called 'colour'"),
        ("id,lower,start,upper,size\n", "line 1: the column lower is there twice"),
        (HEADER + "a,0,1,1\na,1,2,1\n", "line 3: the id a is also that of line 2"),
        (HEADER + ",0,1,1\n", "line 2: the id is missing"),
        (HEADER + "a,0,1,1\nb,5,5,1\n", "line 3: Buffer b lives from 5 to 5"),
        (HEADER + "a,5,4,1\n", "line 2: Buffer a lives from 5 to 4"),
        (HEADER + "a,0,1,0\n", "line 2: Buffer a has the size 0"),
        (HEADER + "a,0,1,-3\n", "line 2: Buffer a has the size -3"),
        (HEADER + "a,0,1,1.5\n", "line 2: size is '1.5'"),
        (HEADER + "a,0,x,1\n", "line 2: upper is 'x'"),
        (HEADER + "a,0,,1\n", "line 2: upper is ''"),
        (HEADER + "a,0,1,1,7\n", "line 2: there are 5 fields, and the header names 4"),
        (HEADER + "a,0,1\n", "line 2: there are 3 fields"),
        (HEADER + "a,0,1,²\n", "line 2: size is"),
        (HEADER + 'a,0,1,"1\n', "line 2: unexpected end of data"),
        ("id,lower,upper,size,gaps\na,0,9,1,2-3\n", "line 2: lives with gaps"),
        (HEADER + "a,0,1," + "9" * 5000 + "\n", "line 2: size is"),
    ],
)
def test_malformed_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileFormatError, match=message) as caught:
        load_csv(written(tmp_path, text))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


def test_buffer_larger_than_the_capacity_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleLayout, match="line 3: buffer b of size 11 is larger than the capacity 10"):
        load_csv(written(tmp_path, HEADER + "a,0,1,10\nb,0,1,11\n"), 10)


def test_binary_and_missing_files_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.csv"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    for path in (binary, tmp_path / "missing.csv", tmp_path):
        with pytest.raises(RematError):
            load_csv(path)
