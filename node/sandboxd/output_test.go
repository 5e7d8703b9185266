// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"opensandbox.io/node/record"
	"opensandbox.io/node/wire"
)

// Between the end on record and the end as told, the output moves from the spool to its last place: whoever asks in
// that moment hears of no end yet, and loses no output.
func TestNobodySeesAnEndWhoseOutputIsOnItsWay(t *testing.T) {
	dir := t.TempDir()
	records, err := record.Open(filepath.Join(dir, "records"))
	if err != nil {
		t.Fatal(err)
	}
	d := &Daemon{records: records, spools: filepath.Join(dir, "spool")}
	s := newSandbox(record.Record{ID: "0f6a7d57-750c-4bcb-8900-3d56cb834018"})
	spool := filepath.Join(d.spools, s.record.ID)
	if err := os.MkdirAll(spool, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(spool, entrypointLog), []byte("said"), 0o600); err != nil {
		t.Fatal(err)
	}
	s.state = wire.ReportStateRunning
	s.record.Phase, s.record.End = record.Ended, &wire.NodeEnd{Reason: wire.NodeEndReasonExited, At: time.Now()}
	check := func(when string) {
		t.Helper()
		if text, err := d.output(s); err != nil || string(text) != "said" {
			t.Errorf("%s: output %q, %v", when, text, err)
		}
	}
	check("in the spool")
	if err := d.keepOutput(s.record.ID); err != nil {
		t.Fatal(err)
	}
	check("on its way")
	if end := d.report(s).End; end != nil {
		t.Errorf("the end is told early: %+v", end)
	}
	s.state = wire.ReportStateEnded
	check("kept")
	if d.report(s).End == nil {
		t.Error("the end is not told")
	}
}
