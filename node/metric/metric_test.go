// SPDX-License-Identifier: Apache-2.0

package metric

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"runtime"
	"testing"
	"time"

	"opensandbox.io/node/cgroup"
)

type fake struct {
	usage cgroup.Usage
	err   error
}

func (f *fake) Read() (cgroup.Usage, error) { return f.usage, f.err }

func TestShareIsSinceTheLastQuestion(t *testing.T) {
	now := time.Unix(1000, 0)
	m := &fake{usage: cgroup.Usage{CPU: time.Second, CPULimitMillis: 500, Memory: 3 << 20, MemoryLimit: 8 << 20}}
	g := New(m)
	g.now, g.at = func() time.Time { return now }, now
	step := func(wall, cpu time.Duration, want float64) {
		t.Helper()
		now = now.Add(wall)
		m.usage.CPU += cpu
		got, err := g.Read()
		if err != nil || got.CPUUsedPct != want {
			t.Errorf("got %v %v, want %v", got.CPUUsedPct, err, want)
		}
		if got.CPUCount != 0.5 || got.MemTotalMib != 8 || got.MemUsedMib != 3 || got.Timestamp != now.UnixMilli() {
			t.Errorf("got %+v", got)
		}
	}
	step(2*time.Second, 500*time.Millisecond, 50) // since the start
	step(time.Second, 500*time.Millisecond, 100)
	step(time.Second, time.Second, 100) // a burst over the quota is not more than all
	step(time.Millisecond, time.Millisecond, 100)
	step(999*time.Millisecond, 124*time.Millisecond, 25) // with the short one before it
	step(time.Second, 0, 0)
}

func TestNoLimitMeansTheMachine(t *testing.T) {
	for _, m := range []Meter{&fake{}, nil} {
		got, err := New(m).Read()
		if err != nil || got.CPUCount != float64(runtime.NumCPU()) || got.MemTotalMib < 100 || got.CPUUsedPct < 0 || got.CPUUsedPct > 100 {
			t.Errorf("got %+v %v", got, err)
		}
	}
}

func TestUnreadableCountersAreAnError(t *testing.T) {
	mux := http.NewServeMux()
	New(&fake{err: errors.New("gone")}).Routes(mux)
	w := httptest.NewRecorder()
	mux.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 500 {
		t.Errorf("got %d", w.Code)
	}
}
