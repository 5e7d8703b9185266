// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"testing"
	"time"
)

func TestThePoolGrowsWithTheDemandAndGoesBack(t *testing.T) {
	p := &pool{rest: 2}
	now := time.Unix(1_000_000, 0)
	most := min(maxShells, memoryForShells())
	for _, c := range []struct {
		about        string
		later, asked int
		want         int
	}{
		{"at rest", 0, 0, 2},
		{"a few", 0, 3, 2},
		{"half of what was asked for", 1, 13, min(8, most)},
		{"remembered", memorySpan - 3, 0, min(8, most)},
		{"the first forgotten", 2, 0, min(6, most)},
		{"all forgotten", memorySpan, 0, 2},
		{"not without bound", 0, 10 * maxShells, most},
		{"a long silence", 1 << 30, 0, 2},
	} {
		now = now.Add(time.Duration(c.later) * time.Second)
		for range c.asked {
			p.count(now)
		}
		if got := p.wanted(now); got != c.want {
			t.Errorf("%s: %d, want %d", c.about, got, c.want)
		}
	}
	if off := (&pool{}); off.wanted(now) != 0 {
		t.Error("switched off, it still wants shells")
	}
}
