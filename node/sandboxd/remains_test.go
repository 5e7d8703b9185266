// SPDX-License-Identifier: Apache-2.0

package sandboxd_test

import (
	"encoding/json"
	"strings"
	"testing"

	"opensandbox.io/node/wire"
)

func TestTheAnswerToADeleteTellsWhatIsLeft(t *testing.T) {
	n := newNode(t)
	running := n.create(request("sh", "-c", "echo first words; exec sleep infinity"))
	running.out("echo from a command")
	var journal []byte
	if err := n.call("GET", "/sandboxes/"+running.ID+"/journal", nil, &journal); err != nil {
		t.Fatal(err)
	}
	var ran []string
	for line := range strings.Lines(string(journal)) {
		var record struct{ ID, Content string }
		if err := json.Unmarshal([]byte(line), &record); err != nil {
			t.Errorf("line %q: %v", line, err)
		}
		ran = append(ran, record.Content)
	}
	if !strings.Contains(strings.Join(ran, "\n"), "echo from a command") {
		t.Errorf("journal %q", ran)
	}
	var left wire.Remains
	if err := n.call("DELETE", "/sandboxes/"+running.ID+"?remains=true", nil, &left); err != nil {
		t.Fatal(err)
	}
	if left.End == nil || left.End.Reason != wire.NodeEndReasonKilled || left.End.PeakMemoryBytes == nil {
		t.Errorf("end %+v", left.End)
	}
	if string(left.Output) != "first words\n" || !strings.Contains(string(left.Journal), "echo from a command") {
		t.Errorf("output %q, journal %q", left.Output, left.Journal)
	}
	ended := n.create(request("sh", "-c", "echo last words; exit 4"))
	n.ended(ended.ID)
	left = wire.Remains{}
	if err := n.call("DELETE", "/sandboxes/"+ended.ID+"?remains=true", nil, &left); err != nil {
		t.Fatal(err)
	}
	if left.End == nil || left.End.ExitCode == nil || *left.End.ExitCode != 4 || string(left.Output) != "last words\n" {
		t.Errorf("ended: %+v, output %q", left.End, left.Output)
	}
	n.checkClean()
}
