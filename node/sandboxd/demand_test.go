// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"testing"
	"time"

	"opensandbox.io/node/launch"
)

func TestAShellOfAnOlderImageIsGivenUp(t *testing.T) {
	before, now := &launch.Base{Image: "a", Profile: "strict"}, &launch.Base{Image: "b", Profile: "strict"}
	p := &pool{waiting: []waitingShell{{new(launch.Shell), before}}}
	if p.take(&launch.Base{Profile: "nested"}) != nil || len(p.waiting) != 1 {
		t.Error("a shell of another profile was touched")
	}
	if p.take(now) != nil || len(p.waiting) != 0 {
		t.Error("a shell of the image before is still there")
	}
	p.closing.Wait()
}

func TestThePoolFollowsTheDemand(t *testing.T) {
	start := time.Unix(1000, 0)
	p := &pool{rest: 3}
	at := func(second int) int { return p.wanted(start.Add(time.Duration(second) * time.Second)) }
	if n := at(0); n != 3 {
		t.Errorf("%d at rest", n)
	}
	for range 20 {
		p.count(start)
	}
	if n := at(1); n != 10 {
		t.Errorf("%d after 20 creates", n)
	}
	for range 1000 {
		p.count(start.Add(2 * time.Second))
	}
	if n := at(3); n > maxShells || n < 10 {
		t.Errorf("%d after 1020 creates", n)
	}
	if n := at(2 + memorySpan); n != 3 {
		t.Errorf("%d when all is forgotten", n)
	}
	if p := (&pool{}); p.wanted(start) != 0 {
		t.Error("a pool that is switched off wants shells")
	}
}
