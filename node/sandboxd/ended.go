// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"opensandbox.io/node/wipe"
	"opensandbox.io/node/wire"
)

// endedDir lies in the run directory and holds how sandboxes ended, a file for each that is not deleted yet. ingress
// reads it, so that whoever asks for one is told what became of it. It is made anew at each start: the records know.
const endedDir = "ended"

// keepEnds fills the directory and keeps it up to date.
func (d *Daemon) keepEnds() {
	dir := filepath.Join(d.runDir, endedDir)
	err := errors.Join(wipe.Tree(dir), os.Mkdir(dir, 0o750), os.Chown(dir, -1, d.group))
	if err != nil {
		d.log.Warn("ingress cannot say how sandboxes ended", "error", err)
		return
	}
	// Heard before what is there already is listed: an end may be written twice, never not at all.
	d.watchers.hear(func(event wire.Event) {
		if event.Type == wire.EventTypeEnded && event.Report != nil {
			d.keepEnd(*event.Report)
		}
	})
	for _, s := range d.all() {
		if !s.alive() {
			d.keepEnd(d.report(s))
		}
	}
}

// isSignal tells what a signal may be called: execd wrote it, in a sandbox.
func isSignal(name string) bool {
	return len(name) < 16 && strings.HasPrefix(name, "SIG") && strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-") == ""
}

func (d *Daemon) keepEnd(report wire.Report) {
	if report.End == nil {
		return
	}
	// Only what is the node's own word; messages may be the program's.
	end := wire.NodeEnd{Reason: report.End.Reason, ExitCode: report.End.ExitCode, At: report.End.At}
	if isSignal(report.End.Signal) {
		end.Signal = report.End.Signal
	}
	path := filepath.Join(d.runDir, endedDir, report.ID)
	text, err := json.Marshal(end)
	if err == nil {
		err = os.WriteFile(path+".new", text, 0o640)
	}
	if err == nil {
		err = errors.Join(os.Chown(path+".new", -1, d.group), os.Rename(path+".new", path))
	}
	if err != nil {
		d.log.Warn("ingress cannot say how a sandbox ended", "sandbox", report.ID, "error", err)
	}
	if _, err := d.get(report.ID); err != nil {
		d.ingress.forgetEnd(report.ID) // deleted meanwhile, perhaps before there was a file
	}
}

// forgetEnd is for a sandbox that is deleted.
func (i *ingress) forgetEnd(id string) {
	path := filepath.Join(i.runDir, endedDir, id)
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		i.log.Error("left behind", "sandbox", id, "what", "end for ingress", "error", err)
	}
}
