// SPDX-License-Identifier: Apache-2.0

package launch

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

func openBlocks(t *testing.T, dir string) *Blocks {
	t.Helper()
	b, err := OpenBlocks(dir)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestTwoInstancesNeverGetTheSameBlock(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blocks")
	one, other := openBlocks(t, dir), openBlocks(t, dir)
	seen := map[int]bool{}
	for range 10 {
		for _, blocks := range []*Blocks{one, other} {
			b, err := blocks.Claim()
			if err != nil {
				t.Fatal(err)
			}
			if seen[b.N] {
				t.Fatalf("block %d was given out twice", b.N)
			}
			seen[b.N] = true
			defer b.Release()
		}
	}
}

func TestAReleasedBlockIsFreeAndLeavesNoFile(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blocks")
	blocks := openBlocks(t, dir)
	b, err := blocks.Claim()
	if err != nil {
		t.Fatal(err)
	}
	if again, _ := blocks.ClaimAt(b.N); again != nil {
		t.Fatal("claimed twice")
	}
	b.Release()
	b.Release() // harmless
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Fatalf("left %v", left)
	}
	if again, err := blocks.ClaimAt(b.N); err != nil || again == nil {
		t.Fatalf("not free: %v", err)
	} else {
		again.Release()
	}
}

func TestAClaimLivesAsLongAsAnyHolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blocks")
	blocks := openBlocks(t, dir)
	b, err := blocks.Claim()
	if err != nil {
		t.Fatal(err)
	}
	// A process that inherits the open file, as a sandbox's first process does.
	holder := exec.Command("sleep", "60")
	holder.ExtraFiles = []*os.File{nil, b.lock}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	b.lock.Close() // sandboxd dies
	if again, _ := blocks.ClaimAt(b.N); again != nil {
		t.Error("the block was given out while somebody lives in it")
		again.Release()
	}
	process, err := FindProcess(holder.Process.Pid, mustStartTime(t, holder.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	adopted := blocks.Adopt(b.N, process)
	if adopted.lock == nil {
		t.Fatal("the claim was not taken over")
	}
	holder.Process.Kill()
	holder.Wait()
	process.Wait()
	process.Close()
	if again, _ := blocks.ClaimAt(b.N); again != nil {
		t.Error("the adopted claim does not hold")
	}
	adopted.Release()
	if again, _ := blocks.ClaimAt(b.N); again == nil {
		t.Error("the block is not free after its release")
	} else {
		again.Release()
	}
}

func TestSweepTakesOnlyWhatNobodyHolds(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "blocks")
	blocks := openBlocks(t, dir)
	b, err := blocks.Claim()
	if err != nil {
		t.Fatal(err)
	}
	defer b.Release()
	os.WriteFile(filepath.Join(dir, "500"), nil, 0o600)
	openBlocks(t, dir).Sweep()
	left, _ := os.ReadDir(dir)
	if len(left) != 1 || left[0].Name() != "0" {
		t.Fatalf("left %v", left)
	}
}

func TestFindProcess(t *testing.T) {
	start := mustStartTime(t, os.Getpid())
	p, err := FindProcess(os.Getpid(), start)
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if _, err := FindProcess(os.Getpid(), start+1); err != ErrGone {
		t.Errorf("another process with the same pid: %v", err)
	}
}

func mustStartTime(t *testing.T, pid int) uint64 {
	t.Helper()
	start, err := startTime(pid)
	if err != nil {
		t.Fatal(err)
	}
	return start
}
