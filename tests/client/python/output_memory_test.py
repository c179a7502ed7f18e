#!/usr/bin/python3
"""Memory of outputs that is used again, without a server."""

import gc
import sys
import threading
import unittest
from unittest import mock

import package  # pylint: disable=unused-import
# pylint: disable=wrong-import-order
import numpy as np

from quantd import _output_memory

MIB = 1 << 20


def address(array):
    return array.ctypes.data


class OutputMemoryTest(unittest.TestCase):

    def setUp(self):
        self.memory = _output_memory.OutputMemory()

    def test_WhatNobodyUsesIsUsedAgain(self):
        first = self.memory.take(5 * MIB + 1)
        self.assertEqual((first.shape, first.dtype), ((5 * MIB + 1,), np.uint8))
        self.assertTrue(first.flags.writeable and first.flags.c_contiguous)
        first[:] = 1
        at = address(first)
        # A view is a use.
        view = first[3:].view(np.int8).reshape(1, -1)
        del first
        second = self.memory.take(5 * MIB)
        self.assertNotEqual(address(second), at)
        del view
        third = self.memory.take(6 * MIB)
        self.assertEqual(address(third), at)
        third[-1] = 1

    def test_AnArrayNeverHasMuchMoreThanItsSize(self):
        at = address(self.memory.take(64 * MIB))
        self.assertNotEqual(address(self.memory.take(8 * MIB)), at)
        self.assertEqual(address(self.memory.take(60 * MIB)), at)

    def kept_bytes(self):
        # pylint: disable-next=protected-access
        return sum(map(len, [*self.memory._blocks, *self.memory.freed]))

    def test_NoMoreThanTheCapIsKept(self):
        arrays = [self.memory.take(64 * MIB) for _ in range(6)]
        del arrays
        self.assertEqual(self.kept_bytes(), 256 * MIB)
        self.memory.close()
        # pylint: disable-next=protected-access
        self.assertEqual(self.memory._blocks, [])

    def test_WhatComesBackWhileOthersAreAtItIsTakenAfterwards(self):
        arrays = [self.memory.take(64 * MIB) for _ in range(6)]
        collect = self.memory._collect  # pylint: disable=protected-access

        def drop_within():
            collect()
            arrays.clear()

        with mock.patch.object(self.memory, "_collect", drop_within):
            taken = self.memory.take(2 * MIB)
            self.assertEqual(self.kept_bytes(), 256 * MIB)
            del taken

    def test_ArraysOutliveTheirMemory(self):
        array, other = self.memory.take(4 * MIB), self.memory.take(4 * MIB)
        array[:] = 7
        self.memory.close()
        del other
        self.assertIsNone(self.memory.freed)
        del self.memory
        gc.collect()
        self.assertTrue((array == 7).all())

    def test_WhatCanNotBeHadIsAnErrorOfMemory(self):
        for size in (1 << 60, sys.maxsize):
            with self.assertRaises(MemoryError):
                self.memory.take(size)

    def test_ThreadsNeverShareMemory(self):
        faults = []

        def work(mark):
            for _ in range(200):
                array = self.memory.take(2 * MIB)
                array[::4096] = mark
                if not (array[::4096] == mark).all():
                    faults.append(mark)
                    return

        threads = [threading.Thread(target=work, args=(mark,))
                   for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(faults, [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
