// SPDX-License-Identifier: Apache-2.0

package isolated

import "testing"

// Where nothing is mounted, nothing can be made read-only: that is an error, not a success.
func TestReadOnlyNeedsAMount(t *testing.T) {
	table, err := mountTable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for path, ok := range map[string]bool{dir: false, dir + "/none": false, "/proc": true} {
		if id, err := mountAt(path, table); (err == nil) != ok {
			t.Errorf("%s: mount %d, %v", path, id, err)
		}
	}
}

// Only another mount is an excuse for one that is not where the table has it.
func TestCovered(t *testing.T) {
	table := []mounted{
		{id: 1, parent: 900, path: "/new"},
		{id: 2, parent: 1, path: "/new/sys"},
		{id: 3, parent: 2, path: "/new/sys/proc"},
		{id: 4, parent: 2, path: "/new/sys"}, // above 2 and thus 3
		{id: 5, parent: 4, path: "/new/sys/fs"},
		{id: 6, parent: 1, path: "/new/system"},
		{id: 7, parent: 1, path: "/new/work space"},
	}
	for _, m := range table {
		if want := m.id == 2 || m.id == 3; covered(m, table) != want {
			t.Errorf("%+v: want %v", m, want)
		}
	}
}
