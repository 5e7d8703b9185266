// SPDX-License-Identifier: Apache-2.0

package enter

import (
	"bytes"
	"testing"
)

func TestLogOnTheHostIsBounded(t *testing.T) {
	var kept bytes.Buffer
	log := &bounded{w: &kept, left: 10}
	for _, line := range []string{"four", "five5", "too long", "x"} {
		if n, err := log.Write([]byte(line)); n != len(line) || err != nil {
			t.Errorf("%q: %d, %v", line, n, err)
		}
	}
	// After the first line that does not fit nothing comes any more: half a log misleads.
	if kept.String() != "fourfive5" {
		t.Errorf("kept %q", kept.String())
	}
}
