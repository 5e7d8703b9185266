// SPDX-License-Identifier: Apache-2.0

package thread

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

func TestRunIsNotOnTheFirstThreadAndPassesResultsOn(t *testing.T) {
	wrong := errors.New("wrong")
	for range 50 {
		tid, err := Run(func() (int, bool, error) { return unix.Gettid(), true, wrong })
		if tid == os.Getpid() || !errors.Is(err, wrong) {
			t.Fatalf("thread %d of process %d, %v", tid, os.Getpid(), err)
		}
	}
}

func TestAThreadThatIsNotCleanIsNotUsedAgain(t *testing.T) {
	used := map[int]bool{}
	for range 20 {
		tid, _ := Run(func() (int, bool, error) { return unix.Gettid(), false, nil })
		if used[tid] {
			t.Fatalf("thread %d came back", tid)
		}
		used[tid] = true
	}
}

func TestBackgroundWorkHasLowPriorityAndOthersHaveNot(t *testing.T) {
	own := nice()
	type seen struct{ caller, run int }
	got := make(chan seen)
	go func() {
		Background()
		run, _ := Run(func() (int, bool, error) { return nice(), true, nil })
		got <- seen{nice(), run}
	}()
	if s := <-got; s.caller != own+background || s.run != s.caller {
		t.Errorf("priorities %+v, want %d", s, own+background)
	}
	for range 50 {
		if n, _ := Run(func() (int, bool, error) { return nice(), true, nil }); n != own {
			t.Fatalf("a thread kept the priority %d", n)
		}
	}
}

func TestNormallyIsAsTheProcessWasStarted(t *testing.T) {
	got := make(chan [3]int)
	go func() {
		Background()
		before, inside := nice(), 0
		Normally(func() { inside = nice() })
		got <- [3]int{before, inside, nice()}
	}()
	if seen := <-got; seen != [3]int{normal + background, normal, normal + background} {
		t.Errorf("before, inside and after: %v; started with %d", seen, normal)
	}
}
