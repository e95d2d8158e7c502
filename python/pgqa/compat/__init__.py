"""Other libraries' interfaces over pgqa: a user changes the import and keeps the rest."""
# SPDX-License-Identifier: Apache-2.0
