// SPDX-License-Identifier: Apache-2.0

package record

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"opensandbox.io/node/wire"
)

func open(t *testing.T) Dir {
	t.Helper()
	d, err := Open(filepath.Join(t.TempDir(), "records"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestARecordComesBackAsItWasSaved(t *testing.T) {
	d := open(t)
	code := 3
	want := &Record{ID: "a", Phase: Ended, Slot: 4, PID: 17, StartTime: 99, Entrypoint: []string{"sleep", "1"},
		CreatedAt: time.Unix(1000, 0).UTC(), End: &wire.NodeEnd{Reason: wire.NodeEndReasonExited, ExitCode: &code, At: time.Unix(1001, 0).UTC()}}
	if err := d.Save(want); err != nil {
		t.Fatal(err)
	}
	got, err := d.Load()
	if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0], want) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := d.Remove("a"); err != nil {
		t.Fatal(err)
	}
	left, _ := os.ReadDir(string(d))
	if len(left) != 0 {
		t.Fatalf("left: %v", left)
	}
}

func TestADamagedRecordDoesNotHideTheOthers(t *testing.T) {
	d := open(t)
	if err := d.Save(&Record{ID: "good", Phase: Running}); err != nil {
		t.Fatal(err)
	}
	os.WriteFile(filepath.Join(string(d), "bad.json"), []byte(`{"id":`), 0o600)
	os.WriteFile(filepath.Join(string(d), "moved.json"), []byte(`{"id":"good"}`), 0o600)
	got, err := d.Load()
	if len(got) != 1 || got[0].ID != "good" {
		t.Fatalf("got %v", got)
	}
	if err == nil || !strings.Contains(err.Error(), "bad") || !strings.Contains(err.Error(), "moved") {
		t.Fatalf("error %v", err)
	}
}

func TestAnEndFromInsideMayOnlyClaimWhatInsideCanKnow(t *testing.T) {
	d := open(t)
	for text, believed := range map[string]bool{
		`{"reason":"exited","exitCode":0,"at":"2026-01-01T00:00:00Z"}`:          true,
		`{"reason":"signalled","signal":"SIGTERM","at":"2026-01-01T00:00:00Z"}`: true,
		`{"reason":"expired","at":"2026-01-01T00:00:00Z"}`:                      false,
		`{"reason":"exi`: false,
		``:               false,
		`{"reason":"exited","message":"` + strings.Repeat("x", maxEnd) + `"}`: false,
	} {
		f, err := d.CreateEnd("a")
		if err != nil {
			t.Fatal(err)
		}
		f.WriteString(text)
		f.Close()
		if got := d.End("a") != nil; got != believed {
			t.Errorf("%.60q: believed %v", text, got)
		}
	}
}

func TestSweepKeepsRecordsAndTheirFiles(t *testing.T) {
	d := open(t)
	d.Save(&Record{ID: "kept", Phase: Running})
	for _, id := range []string{"kept", "stray"} {
		f, _ := d.CreateEnd(id)
		f.Close()
	}
	if err := d.Sweep(func(id string) bool { return id == "kept" }); err != nil {
		t.Fatal(err)
	}
	left, _ := filepath.Glob(string(d) + "/*")
	if len(left) != 2 {
		t.Fatalf("left %v", left)
	}
}
