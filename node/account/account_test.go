// SPDX-License-Identifier: Apache-2.0

package account

import (
	"fmt"
	"testing"
)

func TestParse(t *testing.T) {
	b := Parse("root:x:0:0:root:/root:/bin/sh\nann:x:1000:1000::/home/ann:/bin/sh\nbroken\n:x:1:1:::\nbad:x:abc:1::/:\nann:x:1:1::/:\nmax:x:4294967295:0::/:\n",
		"root:x:0:\nann:x:1000:\nwheel:x:10:ann,root\nvideo:x:44:ann,\nbroken\nbad:x:x:\n")
	ann, ok := b.User(1000)
	if !ok || ann.Name != "ann" || ann.Home != "/home/ann" || fmt.Sprint(b.Groups(ann)) != "[10 44]" {
		t.Errorf("ann is %+v %v", ann, b.Groups(ann))
	}
	if uid, ok := b.UID("ann"); !ok || uid != 1000 {
		t.Errorf("first line should win: %d", uid)
	}
	for name, want := range map[string]bool{"42": true, "-1": false, "4294967295": false, "nobody-here": false, "": false, "bad": false} {
		if _, ok := b.UID(name); ok != want {
			t.Errorf("%q: %v", name, ok)
		}
	}
	if b.UserName(7) != "7" || b.GroupName(44) != "video" || b.GroupName(45) != "45" {
		t.Error("names")
	}
}
